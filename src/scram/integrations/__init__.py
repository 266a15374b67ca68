"""SCRAM inside other models: torch's attention, transformers."""
