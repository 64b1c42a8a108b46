"""The causal language model: architecture, varlen attention, chunked loss, export."""
