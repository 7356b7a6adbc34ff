"""Reports: one data type, and one renderer each for terminal, Markdown and HTML."""
