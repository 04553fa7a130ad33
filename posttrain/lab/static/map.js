// The map: search, what was read, and the picture of the six roles.
"use strict";

(() => {
  const places = [...document.querySelectorAll(".place")], field = document.getElementById("search");
  let known = [];
  try { known = JSON.parse(localStorage.getItem("lab-read") || "[]"); } catch { /* a browser that keeps nothing */ }
  for (const p of places) p.classList.toggle("read", known.includes(p.dataset.number));
  document.getElementById("count").textContent = known.length ? `${known.length} of ${places.length} read in this browser` : "";
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const p of places) p.hidden = !words.every((w) => p.dataset.words.includes(w));
    for (const part of document.querySelectorAll("section.part-of")) part.hidden = ![...part.querySelectorAll(".place")].some((p) => !p.hidden);
    document.getElementById("none").hidden = places.some((p) => !p.hidden);
  });
  const told = document.getElementById("role-told"), first = told.textContent;
  for (const g of document.querySelectorAll(".roles g[data-told]")) {
    for (const on of ["mouseenter", "focus"]) g.addEventListener(on, () => { told.textContent = g.dataset.told; });
    for (const off of ["mouseleave", "blur"]) g.addEventListener(off, () => { told.textContent = first; });
  }
})();
