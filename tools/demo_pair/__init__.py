"""Training of the small demo pair: a Laguna target and its DFlash drafter."""
