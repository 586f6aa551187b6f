"""A hook that compiles parts of each layer, for example of a reranker of Qwen3's architecture:

    PYTHONPATH=examples/own_code skilltrain train recipes/sr_rank_0.6b.yaml \
        'training.hooks=["compiled_layers:CompiledLayers"]'
"""

from typing import Any

from torch import nn

from skilltrain.training.hooks import Hook

# Ends of the names of compiled classes. Attention is left out: a packed reranker calls it once
# for each bucket, a group of skills of similar length. So each number of buckets needs a graph.
COMPILED_CLASSES = ("MLP", "RMSNorm")


class CompiledLayers(Hook):
    """Compiles norms and feed-forward networks after the first step.

    A hook gets the model for the first time after that step. A resumed run has one more step
    without compilation, so its result may differ by rounding.
    """

    def __init__(self) -> None:
        self.is_compiled = False

    def on_step(self, step: int, metrics: dict[str, float], model: nn.Module) -> None:
        if not self.is_compiled:
            compile_parts(model.network)
            self.is_compiled = True


def compile_parts(network: nn.Module, **options: Any) -> None:
    """Compile all modules whose class name ends in MLP or RMSNorm, such as `Qwen3MLP`.

    All layers share their graphs, and so do texts of all lengths.

    Args:
        network: The transformer.
        **options: Further options of torch.compile.
    """
    for module in network.modules():
        if type(module).__name__.endswith(COMPILED_CLASSES):
            module.compile(dynamic=True, **options)
