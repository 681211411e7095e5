// Takes a new page from time to time. It stays while it cannot be had, or while nobody looks.
const PERIOD = 5000;
async function renew() {
  if (document.hidden) return;
  try {
    const answer = await fetch(location.pathname, { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.status);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    document.querySelector("main").replaceWith(page.querySelector("main"));
    document.body.classList.remove("stale");
  } catch {
    document.body.classList.add("stale");
  }
}
setInterval(renew, PERIOD);
