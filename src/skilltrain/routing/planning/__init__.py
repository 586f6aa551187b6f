"""Compound tasks: steps, a skill for each, and their order (SkillWeaver, section 4)."""
