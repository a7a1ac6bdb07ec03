"""What a chat template is rendered with: a bounded sandbox, and text that remembers who wrote it."""
