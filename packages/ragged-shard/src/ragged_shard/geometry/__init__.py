"""Which elements of a tensor each rank holds, and where it stores them: arithmetic on shapes."""
