"""Exact gradients in the training loops of other libraries, which still call the optimizer themselves.

Modules: `hf` (Hugging Face Trainer), `trl`, `lightning` (with Fabric), `accelerate`, `sentence_transformers`.
Each needs the library of its name; importing this package imports none of them.
"""
