"use strict";
// Loads the page again when its run has changed, unless values are being read from a chart.
const told = document.querySelector("[data-version]");
setInterval(async () => {
  try {
    const said = await fetch("version", { cache: "no-store" });
    const reading = document.querySelector(".readout:not([hidden])");
    if (said.ok && await said.text() !== told.dataset.version && !reading) location.reload();
  } catch {
    told.textContent = "Nothing is followed any more: paceline report --watch has ended.";
  }
}, 2000);
