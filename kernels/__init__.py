"""Triton kernels, each beside its torch reference; importing them needs neither Triton nor a GPU."""
