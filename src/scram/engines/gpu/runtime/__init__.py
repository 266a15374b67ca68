"""The host's side: how kernels are launched, their block sizes, and keys laid out for them."""
