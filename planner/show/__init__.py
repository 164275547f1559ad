"""What a plan looks like: text, tables, figures, pages."""
