"""Laguna DFlash: block-diffusion speculative decoding for Laguna targets."""
