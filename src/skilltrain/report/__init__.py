"""What people read: the report of an evaluation and the page on training lists, as HTML, Markdown and terminal text."""
