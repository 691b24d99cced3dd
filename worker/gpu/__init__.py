"""The model on a GPU: weights as the kernels read them, the two forwards, and the graphs that replay them."""
