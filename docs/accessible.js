// What the theme leaves without a name, or out of reach of the keyboard. Its own script wraps tables before the load ends.
addEventListener("load", () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const part of document.querySelectorAll("nav[aria-labelledby]")) {
    part.ariaLabel = part.querySelector(".md-nav__title").textContent.trim();
    part.removeAttribute("aria-labelledby");
  }
  document.querySelectorAll(".md-code__nav").forEach((bar, index) => (bar.ariaLabel = `Code ${index + 1}`));
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) box.tabIndex = 0;
});

// The page of tokens on the first page follows the colours of the site, by its own button.
function dressLive() {
  const page = document.querySelector("iframe.live")?.contentDocument, button = page?.getElementById("theme");
  if (!button) return;
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const wanted = document.body.dataset.mdColorScheme === "slate" ? "dark" : "light";
  if ((page.documentElement.style.colorScheme || system) !== wanted) button.click();
}
new MutationObserver(dressLive).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
addEventListener("load", dressLive);
