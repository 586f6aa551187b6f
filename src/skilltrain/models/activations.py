"""What a forward pass keeps for the backward pass: how to keep less."""

from typing import Any

from skilltrain.errors import SkilltrainError


def checkpoint_layers(network: Any) -> None:
    """Let every layer keep only its inputs while the network trains, and compute the rest again when it is needed.

    Chen et al. 2016 (arXiv 1604.06174). Loss and gradients stay the same, dropout included. Raises SkilltrainError
    for a network whose transformers code cannot do so.
    """
    try:
        network.activation_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        what = f"transformers' {type(network).__name__} cannot recompute its layers"
        raise SkilltrainError(what, where="training.recompute", fix="set it to false, and lower batch_size") from error
