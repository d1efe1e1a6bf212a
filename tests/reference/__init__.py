"""Independent float64 numpy forwards of the drafter and of the target; they share no code with the package."""
