"""Compound tasks: cut into steps, a skill found for each, and the steps put in order (SkillWeaver, section 4)."""
