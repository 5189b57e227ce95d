"""Activity: what this instance did recently, the events that no record has, and the audit trail. Imports records."""
