"""Models as folders that others can open."""

from typing import Literal

Form = Literal["sequence_classification", "multi_vector", "onnx", "openvino"]
"""What a model's folder can be beside what training saves; see `forms.write_form`."""
