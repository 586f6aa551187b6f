"""Systems that answer queries with skills: candidates, evaluation, routing."""
