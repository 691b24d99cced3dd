"""Triton kernels: one source for GB10 (sm_121), Hopper (sm_90) and the interpreter on a CPU.

Each file names the plain-torch reference in :mod:`kernels` that it equals.
"""
