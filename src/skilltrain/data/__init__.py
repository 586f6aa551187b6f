"""From skills and queries as they are found to the tables that training reads."""
