"""Shows which rank holds which elements of a tensor, in a terminal and as SVG."""
