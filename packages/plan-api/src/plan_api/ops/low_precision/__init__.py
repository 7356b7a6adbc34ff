"""Linear layers whose matrix products take float8 operands; without a plan, too.

A recipe (`recipes`) says how each operand of the three products of a linear layer is quantized
(`quantize`): of its output, and of the gradients of its input and its weight. Products run in
kernels of torch where the device has them, and by a reference elsewhere (`products`). `linear` puts
these together, on local tensors, and `dtensors` on DTensors.
"""
