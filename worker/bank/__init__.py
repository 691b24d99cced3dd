"""What a sequence leaves behind: rings, open windows, pages of compressed entries."""
