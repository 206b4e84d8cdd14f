"""Everything that imports SGLang, and runs for every request; ``startup`` runs once."""
