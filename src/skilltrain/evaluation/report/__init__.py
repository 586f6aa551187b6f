"""The outcome of an evaluation as JSON, Markdown, a terminal table and one HTML page."""
