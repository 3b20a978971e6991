"""Stock SGLang."""
