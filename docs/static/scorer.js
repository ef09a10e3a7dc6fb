// Sphinx's scores; among equals guides come first, and records, history and internals last.
var Scorer = {
  score: ([page, title, anchor, description, score, filename, kind]) => {
    if (page.startsWith("docs/guide/") || page === "docs/start") return score + 3;
    if (page.startsWith("docs/internals/") || !page.startsWith("docs/")) return score - 10;
    return score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
