"""Files of people's own (Markdown, text, HTML, PDF, Word, PowerPoint) as passages of a collection."""
