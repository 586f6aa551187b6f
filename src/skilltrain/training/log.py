"""One JSON line an optimiser step."""

import json
from pathlib import Path


class TrainingLog:
    """Appends to a file on the main process; lines after the step that a run resumes from are dropped first."""

    def __init__(self, path: Path, resumed_step: int, active: bool) -> None:
        self.path, self.resumed_step, self.active = path, resumed_step, active

    def __enter__(self) -> "TrainingLog":
        if self.active:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lines = self.path.read_text().splitlines() if self.resumed_step and self.path.is_file() else []
            kept = [line for line in lines[: self.resumed_step] if line.endswith("}")]
            self.path.write_text("".join(f"{line}\n" for line in kept))
            self.file = self.path.open("a", buffering=1)
        return self

    def __exit__(self, *_: object) -> None:
        if self.active:
            self.file.close()

    def write(self, step: int, loss: float, learning_rate: float, grad_norm: float, queries_per_second: float) -> None:
        """Keep the step's figures."""
        if self.active:
            row = {
                "step": step,
                "loss": round(loss, 6),
                "learning_rate": learning_rate,
                "grad_norm": round(grad_norm, 4),
                "queries_per_second": round(queries_per_second, 3),
            }
            self.file.write(json.dumps(row) + "\n")
