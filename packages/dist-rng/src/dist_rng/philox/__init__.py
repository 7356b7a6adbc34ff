"""How a GPU draws: which words of the Philox stream an element takes, and how it uses them."""
