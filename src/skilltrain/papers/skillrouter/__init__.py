"""SkillRouter: the recipe's appendices."""
