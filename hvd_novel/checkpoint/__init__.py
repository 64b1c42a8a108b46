"""Checkpoints: folders written aside, flushed, checked by a manifest, and swapped in atomically."""
