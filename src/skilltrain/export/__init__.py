"""Models as folders that others can open."""

from typing import Literal

Form = Literal["sequence_classification", "multi_vector", "onnx"]
"""Forms of a model folder besides the one that training saves; see `forms.write_form`."""
