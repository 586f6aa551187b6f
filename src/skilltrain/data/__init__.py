"""From skills and queries as they are found to the tables that training reads."""

from typing import Literal

DataForm = Literal["pairs", "triplets", "tuples", "trec", "beir", "lists"]
"""Form of training data that `export_data.export_data` writes."""
