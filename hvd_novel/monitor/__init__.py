"""What a run tells: console lines, metrics.jsonl, TensorBoard, status.json."""
