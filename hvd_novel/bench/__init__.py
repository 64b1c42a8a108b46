"""Benchmarks: commands that measure and print ratios. Nothing else imports this."""
