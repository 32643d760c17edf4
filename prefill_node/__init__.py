"""The prefill role: computes prompts and hands them over."""
