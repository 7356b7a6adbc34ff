"""One rule per kind of operator: which placements of its inputs give which outputs."""
