"""Pictures: read, match and denoise them. Torch in, torch out; files need the extra `cli` (Pillow)."""
