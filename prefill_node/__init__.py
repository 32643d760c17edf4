"""The prefill role: computes prompts and sends them to decode nodes."""
