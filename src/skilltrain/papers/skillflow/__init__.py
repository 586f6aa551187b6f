"""SkillFlow: a cascade of retrieval, reranking and admission."""
