"""Export of trained models: model cards, other forms of a model, and uploads to the Hub."""

from typing import Literal

Form = Literal["sequence_classification", "multi_vector", "onnx"]
"""Form of a model folder, if not the one that training saves; see `forms.write_form`."""
