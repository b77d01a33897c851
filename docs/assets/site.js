// Tables, formulas and drawings that are wider than the column can be scrolled with the keyboard.
addEventListener("load", () => {
  for (const wide of document.querySelectorAll(".md-typeset__scrollwrap, .formula, .drawing")) {
    if (wide.scrollWidth > wide.clientWidth) wide.tabIndex = 0;
  }
});
