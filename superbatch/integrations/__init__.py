"""The exact gradient inside the training loops of other libraries, which keep their step.

Each module needs one of them: `hf` (Hugging Face Trainer and TRL), `lightning` (with Fabric), `accelerate`,
`sentence_transformers`. Importing this package imports none.
"""
