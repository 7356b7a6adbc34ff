"""Pictures of an ownership: `grid` scales it down, `terminal` and `svg` draw it."""
