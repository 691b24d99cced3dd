"""The maths on tensors: quant formats, matmul, attention, experts, sampling. Knows nothing of requests or
files.
"""
