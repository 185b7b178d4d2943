"""LoRA adapters on a shared base."""
