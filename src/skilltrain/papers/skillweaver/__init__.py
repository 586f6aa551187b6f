"""SkillWeaver: plans for compound tasks."""
