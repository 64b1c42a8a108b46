"""What compression would do to the time of a step: measured, predicted, chosen."""
