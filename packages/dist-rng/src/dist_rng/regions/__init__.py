"""Which elements of a global tensor a rank holds, and in which order one device draws them."""
